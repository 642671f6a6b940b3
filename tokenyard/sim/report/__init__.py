"""Results of simulations: figures, charts and pages."""
