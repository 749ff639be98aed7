"""How ranks agree: connections, reports, plans, and who fell silent."""
