"""Summaries and timelines of planned steps."""

from ebbtide.measured import Measured as Measured
from ebbtide.report.summary import Summary as Summary
from ebbtide.report.summary import summarise as summarise
from ebbtide.report.timeline import timeline_data as timeline_data
from ebbtide.report.timeline import write_timeline as write_timeline
