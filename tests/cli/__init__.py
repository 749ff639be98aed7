"""Tests of the command line, and the one place that they have its application from."""

from evenstep.cli._app import app as app
