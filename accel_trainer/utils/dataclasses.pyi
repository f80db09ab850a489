from accel_trainer.utils import *
from accel_trainer.utils.constants import *
