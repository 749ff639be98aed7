"""What is looked for in a script: mistakes that would change the result, and that nothing says."""
