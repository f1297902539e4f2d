from .ablate import ablate_heads as ablate_heads
from .loading import load as load
from .loading import load_builtin as load_builtin
from .site import Site as Site
from .site import find_sites as find_sites
from .transformers import register_attention as register_attention
