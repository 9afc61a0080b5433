"""Tasks: problems, how they are put to the model, and the names of the rewards that judge the answers."""

from groupline.tasks.pairs import read_pairs
from groupline.tasks.problems import read_problems
from groupline.tasks.task import Task, check_gold, get_task

__all__ = ["Task", "check_gold", "get_task", "read_pairs", "read_problems"]
