# The front door: every public name of `multihead`, written once. `__init__.py` imports them lazily.
from . import checks as checks
from . import costs as costs
from . import data as data
from . import errors as errors
from . import layers as layers
from . import masks as masks
from . import models as models
from . import ops as ops
from . import pruning as pruning
from . import reader as reader
from . import report as report
from . import testing as testing
from .checks.run import check as check
from .costs.cost import cost as cost
from .errors import MultiheadError as MultiheadError
from .layers.attention import MultiHeadAttention as MultiHeadAttention
from .layers.block import TransformerBlock as TransformerBlock
from .layers.cache import Cache as Cache
from .layers.cache import WindowCache as WindowCache
from .layers.latent import LatentAttention as LatentAttention
from .models.ablate import ablate_heads as ablate_heads
from .models.loading import load as load
from .models.loading import load_builtin as load_builtin
from .ops.functional import attention as attention
from .pruning.gqa import share as share
from .pruning.plan import Plan as Plan
from .pruning.prune import prune as prune
from .pruning.tune import tune as tune
from .reader.compare import compare as compare
from .reader.maps import read_maps as read_maps
from .reader.read import read as read
from .reader.session import reading as reading
from .reader.statistics import Statistic as Statistic
from .reader.table import Table as Table
from .reader.table import load_table as load_table

__version__: str
