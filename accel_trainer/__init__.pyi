"""The names of `accel_trainer.__getattr__` for type checkers and editors, which do not follow it."""

from accel_trainer.accelerator import Accelerator as Accelerator
from accel_trainer.data_loader import prepare_data_loader as prepare_data_loader
from accel_trainer.data_loader import skip_first_batches as skip_first_batches
from accel_trainer.launch.notebook import debug_launcher as debug_launcher
from accel_trainer.launch.notebook import notebook_launcher as notebook_launcher
from accel_trainer.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_trainer.plugins import AutocastKwargs as AutocastKwargs
from accel_trainer.plugins import DataLoaderConfiguration as DataLoaderConfiguration
from accel_trainer.plugins import DDPCommunicationHookType as DDPCommunicationHookType
from accel_trainer.plugins import DeepSpeedPlugin as DeepSpeedPlugin
from accel_trainer.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_trainer.plugins import DummyOptim as DummyOptim
from accel_trainer.plugins import DummyScheduler as DummyScheduler
from accel_trainer.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_trainer.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_trainer.plugins import GradScalerKwargs as GradScalerKwargs
from accel_trainer.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_trainer.plugins import ParallelismConfig as ParallelismConfig
from accel_trainer.plugins import ProfileKwargs as ProfileKwargs
from accel_trainer.plugins import ProjectConfiguration as ProjectConfiguration
from accel_trainer.plugins import TorchDynamoPlugin as TorchDynamoPlugin
from accel_trainer.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_trainer.state import AcceleratorState as AcceleratorState
from accel_trainer.state import DistributedType as DistributedType
from accel_trainer.state import GradientState as GradientState
from accel_trainer.state import PartialState as PartialState
from accel_trainer.trainer import Seq2SeqTrainer as Seq2SeqTrainer
from accel_trainer.trainer import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from accel_trainer.trainer import Trainer as Trainer
from accel_trainer.trainer import TrainingArguments as TrainingArguments
from accel_trainer.utils import find_executable_batch_size as find_executable_batch_size
from accel_trainer.utils import init_empty_weights as init_empty_weights
from accel_trainer.utils import init_on_device as init_on_device
from accel_trainer.utils import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel_trainer.utils import load_checkpoint_in_model as load_checkpoint_in_model
from accel_trainer.utils import set_seed as set_seed
from accel_trainer.utils import synchronize_rng_states as synchronize_rng_states

__version__: str
