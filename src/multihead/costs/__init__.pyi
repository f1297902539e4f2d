from .cost import Cost as Cost
