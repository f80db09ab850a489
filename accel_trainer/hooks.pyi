from accel_trainer.big_models import *
