"""The same job under several pruning methods: which reach the accuracy of the baseline, at what cost, and how surely.

A benchmark by a method's authors easily flatters the method. The rules against that are in `verdict.py`.
"""
