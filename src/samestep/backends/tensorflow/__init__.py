"""TensorFlow, behind the classes of backends/base.py."""
