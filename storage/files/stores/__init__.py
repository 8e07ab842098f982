"""Stores of immutable objects: what one provides, a directory, a bucket, and the choice by a URL."""
