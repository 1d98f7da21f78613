"""MXNet, behind the classes of backends/base.py."""
