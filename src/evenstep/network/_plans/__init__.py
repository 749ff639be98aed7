"""Shares for links that are given: values in, shares and seconds out."""
