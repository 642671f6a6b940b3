"""The files of the pages that people look at: a server's, a router's, and those that reports are made of.

Plain HTML, CSS and JavaScript, shipped as they are. `vendor/` has uPlot 1.6.32 (MIT, its licence beside it), which
draws the curves. Nothing here comes from another host, at build time or at run time.
"""
