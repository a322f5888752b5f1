"""What the job's failure policy says of a pod that is no more.

Its rules on exit codes are for the programs that workers run, and applied by the agents. Those on pods are applied
here, to pods that died and to those that had to go: what was merely deleted, or asked to leave, has not failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_operator.plan.roster import Verdict, verdict
from elastic_operator.spec import FailureAction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.model import Pod
    from elastic_operator.spec import FailureRule


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from the end of a pod.

    Attributes:
        charged: it counts against the budget.
        rule: the rule that says so, None where none fits.
        position: where that stands among the rules, from 0.
    """

    charged: bool
    rule: FailureRule | None = None
    position: int = 0

    @property
    def fatal(self) -> bool:
        """Whether the job fails for it."""
        return self.rule is not None and self.rule.action is FailureAction.FAIL_JOB

    @property
    def excludes(self) -> bool:
        """Whether later pods keep away from its node."""
        return self.rule is not None and self.rule.exclude_node


def judge(pod: Pod, rules: Sequence[FailureRule]) -> Judgement:
    """What follows from the end of a pod, that of the run aside. The first rule that fits decides."""
    end = verdict(pod)
    if end in (Verdict.DIED, Verdict.SPARED) or (pod.fate is not None and end is Verdict.LEFT):
        for position, rule in enumerate(rules):
            if _fits(rule, pod):
                return Judgement(rule.action is not FailureAction.IGNORE, rule, position)
    return Judgement(end is Verdict.DIED)


def _fits(rule: FailureRule, pod: Pod) -> bool:
    return bool(rule.pod_reasons & pod.reasons) or any(
        pod.conditions.get(condition.type) == condition.status for condition in rule.pod_conditions
    )
