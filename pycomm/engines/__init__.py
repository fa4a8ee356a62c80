"""Engines that train on the primitives: data parallel, sharded, pipeline, tensor parallel. Public names: ``pycomm``.

An engine uses the package's public interface alone, as a program of yours could; gradients cross the wire in
``reducer/reduce.py``.
"""
