from .run import check as check
