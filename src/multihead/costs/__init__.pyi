from .cost import Cost as Cost
from .shape import Arithmetic as Arithmetic
from .shape import Shape as Shape
