"""One rank's steps: batches and their forwards, own time, weights, reports."""
