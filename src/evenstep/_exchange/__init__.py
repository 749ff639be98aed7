"""How workers agree, whatever trains them: connections, reports, decisions, who fell silent."""
