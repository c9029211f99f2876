"""Hot operations in C++ for the CPU: the sources, and `build`, which compiles and loads them on first use."""
