from .backends import AttentionOutput as AttentionOutput
from .backends import Backend as Backend
from .call import AttentionCall as AttentionCall
from .functional import attention as attention
from .functional import backend_for as backend_for
from .heads import merge_heads as merge_heads
from .heads import split_heads as split_heads
from .slopes import AlibiBias as AlibiBias
