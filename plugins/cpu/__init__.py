"""Compiled CPU kernels: all layers of a target or drafter in one call, and single linear layers.

    vector.h      sixteen floats, number types
    linear.h      products of any number of rows with packed weights
    attention.h   one row over its paged context and the new rows that it sees
    layers.c      the layers, and the functions that Python calls
    trees.h       draft trees, acceptance, committed K/V
    compiler.py   finds a C compiler and builds the library, once per machine
    library.py    the library's structures and functions

A row's result depends neither on the other rows of its pass nor on the number of threads: sums are made in the order of
inputs and positions, whatever the tiles. Where no C compiler is found the models run as PyTorch operators.
"""
