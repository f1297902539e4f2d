from .facts import Finding as Finding
from .report import Report as Report
from .run import check as check
