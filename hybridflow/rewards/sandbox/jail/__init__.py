"""The program that puts a program in the jail: a process of its own, standard library only, one run each.

A training step starts it thousands of times: modules whose import takes long (dataclasses, pathlib, typing) are kept out.
"""
