"""The profiler: what it costs other libraries, and whether subtracting that is right."""
