"""How a report looks: on a light or a dark screen, and on paper."""

from __future__ import annotations

from typing import Final

_LIGHT: Final = """
  --page: #ffffff; --card: #f6f7f9; --line: #dde1e6; --text: #1c2024; --dim: #5d6670;
  --good: #1a7f45; --bad: #c62f2f; --warn: #9a6700;
  --epoch-odd: #3565b5; --epoch-even: #4f83d6; --on-epoch: #ffffff; --unknown: #8a94a0; --lost: #c62f2f;
  --training: #2f9e62; --restoring: #35a3b0; --starting: #4f83d6; --rendezvous: #8f6fd1;
  --waiting: #e0a030; --stopping: #d9705a; --suspended: #a3abb5; --on-state: #ffffff;
"""
_DARK: Final = """
  --page: #14171a; --card: #1d2125; --line: #343a41; --text: #e8eaed; --dim: #9aa4ae;
  --good: #4cc38a; --bad: #ff7a70; --warn: #e3b341;
  --epoch-odd: #3f6db8; --epoch-even: #5b8ad6; --on-epoch: #ffffff; --unknown: #77818c; --lost: #ff8a80;
  --training: #2b8a57; --restoring: #2c8c98; --starting: #3f6db8; --rendezvous: #7b5fc0;
  --waiting: #b98320; --stopping: #b85d4a; --suspended: #6d7681; --on-state: #ffffff;
"""

STYLE: Final = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    """
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
html { background: var(--page); }
body {
  margin: 0 auto; max-width: 1000px; padding: 32px 24px 48px; color: var(--text); background: var(--page);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h1 small { font-size: 15px; font-weight: 400; color: var(--dim); margin-left: 8px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p { margin: 6px 0; }
.head { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; }
.outcome { padding: 2px 14px; border-radius: 99px; font-weight: 600; border: 1.5px solid currentColor; }
.outcome.Succeeded { color: var(--good); } .outcome.Failed { color: var(--bad); }
.outcome.other { color: var(--warn); }
.dim { color: var(--dim); }
.cause { border-left: 4px solid var(--bad); background: var(--card); padding: 10px 14px; margin: 16px 0 0; }
.cause, footer { overflow-wrap: anywhere; }
.cause b { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(124px, 1fr)); gap: 10px; margin: 20px 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.figures dt { color: var(--dim); font-size: 13px; margin: 0; }
.figures dd { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.figures dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--dim); white-space: normal; }
svg { display: block; }
svg text { font-size: 12px; fill: var(--dim); }
.timeline { display: flex; margin-top: 4px; }
.scale { flex: none; overflow: visible; } .plot { flex: 1; min-width: 0; overflow: visible; }
.grid { stroke: var(--line); stroke-dasharray: 2 4; } .base { stroke: var(--dim); }
.epoch.odd { fill: var(--epoch-odd); } .epoch.even { fill: var(--epoch-even); }
.label text { fill: var(--on-epoch); font-weight: 600; pointer-events: none; }
.label { pointer-events: none; }
.hatch-lost { stroke: var(--lost); stroke-width: 5; stroke-opacity: .75; }
.hatch-unknown { stroke: var(--unknown); stroke-width: 3; }
.unknown { stroke: var(--line); }
.failure line { stroke: var(--bad); stroke-width: 1.5; } .failure path { fill: var(--bad); }
.failure.final line { stroke-width: 3; }
.split { width: 100%; border-radius: 6px; margin: 6px 0 14px; }
"""
    + "".join(
        f".state.{state} {{ fill: var(--{state}); background: var(--{state}); }}\n"
        for state in ("training", "restoring", "starting", "rendezvous", "waiting", "stopping", "suspended")
    )
    + """
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; color: var(--dim); font-size: 13px; margin: 4px 0 0 36px; }
.legend svg { display: inline-block; vertical-align: -2px; margin-right: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--dim); font-weight: 500; white-space: nowrap; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.short { white-space: nowrap; } .text { width: 60%; overflow-wrap: anywhere; }
tr { scroll-margin-top: 60px; }
tr:target { background: var(--card); outline: 2px solid var(--bad); }
td.bad { color: var(--bad); }
pre {
  margin: 6px 0; padding: 8px 10px; background: var(--card); border-radius: 6px; overflow-x: auto; max-height: 340px;
  font: 12.5px/1.45 ui-monospace, "Liberation Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere;
}
summary { cursor: pointer; }
footer { margin-top: 36px; color: var(--dim); font-size: 13px; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  h2 { break-after: avoid; } tr, .figures, .timeline, .cause { break-inside: avoid; }
  pre { max-height: none; }
}
"""
)
