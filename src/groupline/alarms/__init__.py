"""What a run's figures warn of, with the evidence and what to do. Rows of metrics in, alarms out; no file is read."""

from groupline.alarms.history import Alarm, History, Rule
from groupline.alarms.rules import RULES
from groupline.alarms.watch import Watch, verdict

__all__ = ["RULES", "Alarm", "History", "Rule", "Watch", "verdict"]
