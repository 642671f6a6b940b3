"""The files of the web pages: the server's, the router's, and those of reports.

Plain HTML, CSS and JavaScript without a build step. `vendor/` has uPlot 1.6.32 (MIT, with its licence), which draws the
curves. Nothing is loaded from another host, at build time or at run time.
"""
