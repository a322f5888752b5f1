"""Runs torchft's lighthouse, by which replica groups find each other, with the arguments of ``torchft_lighthouse``."""

from torchft._torchft import lighthouse_main  # type: ignore[import-not-found] # only torchft's processes have it

lighthouse_main()
