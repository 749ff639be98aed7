"""Tests of the checkup: facts, findings, and how they are gathered."""
