from setuptools import setup  # all settings are in pyproject.toml; this file is for tools that ask for it

setup()
