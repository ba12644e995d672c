"""`jaxfp8rl report`: one run, or a comparison of several, as one static HTML page. Training never imports
this."""

from jaxfp8rl.monitors.report.page import write_report

__all__ = ["write_report"]
