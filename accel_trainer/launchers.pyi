from accel_trainer.launch.notebook import *
