"""Figures and self-contained HTML pages from run directories."""
