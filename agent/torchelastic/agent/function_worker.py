"""The program of workers that call a function: ``python -m torchelastic.agent.function_worker``, under our agent."""

from __future__ import annotations

from torchelastic.agent.function_call import make_call

if __name__ == "__main__":
    make_call()
