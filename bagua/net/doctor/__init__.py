"""`bagua-net doctor`: would a job on this machine, in this environment, use the plugin, and if not, why not?

One file per section of the report. Nothing here changes anything, and native code that is not ours runs in processes
of its own.
"""
