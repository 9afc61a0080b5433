"""TRL's GRPOConfig and GRPOTrainer on groupline's own loop: a script works with only its import changed.

TRL itself is not imported and need not be installed.
"""

from groupline.trl.arguments import GRPOConfig
from groupline.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
