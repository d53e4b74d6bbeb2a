"""to do"""
