"""A recorded run as one page: its events added up, and what is shown of them."""

from ._page import page as page
from ._read_figures import ReportFigures as ReportFigures
from ._read_figures import read_figures as read_figures
