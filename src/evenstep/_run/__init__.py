"""What a run is on one rank, whatever the framework: settings, record, exchange, estimates."""
