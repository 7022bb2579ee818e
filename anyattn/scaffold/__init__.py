"""Packages to begin a plugin with. The files end in .template, and stand otherwise as they will be written.

In names of files and in their text, plugin-name, plugin_name and PluginName stand for the plugin's own.
"""
