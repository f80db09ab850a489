from accel_trainer.runtime.availability import *
from accel_trainer.utils import *
