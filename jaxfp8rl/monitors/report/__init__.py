"""`jaxfp8rl report`: a run, or several beside each other, as one static HTML page. Training never imports
this."""

from jaxfp8rl.monitors.report.page import write_report

__all__ = ["write_report"]
