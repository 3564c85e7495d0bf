"""Solvers choose options: each fills a front with the best choices that it finds."""
