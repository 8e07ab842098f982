"""Which distribution of the package index has a module: names that differ from those of their modules."""

from __future__ import annotations

from typing import Final

__all__ = ["distribution_of"]

#: Top-level module, or module of a namespace package → distribution.
_DISTRIBUTIONS: Final = {
    "Crypto": "pycryptodome",
    "Cryptodome": "pycryptodomex",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "Pillow",
    "Xlib": "python-xlib",
    "attr": "attrs",
    "azure.identity": "azure-identity",
    "azure.storage.blob": "azure-storage-blob",
    "barcode": "python-barcode",
    "bilibili_api": "bilibili-api-python",
    "bs4": "beautifulsoup4",
    "bson": "pymongo",
    "cairo": "pycairo",
    "chinese_calendar": "chinesecalendar",
    "cpuinfo": "py-cpuinfo",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "discord": "discord.py",
    "dns": "dnspython",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "engineio": "python-engineio",
    "faiss": "faiss-cpu",
    "ffmpeg": "ffmpeg-python",
    "fitz": "PyMuPDF",
    "gi": "PyGObject",
    "git": "GitPython",
    "github": "PyGithub",
    "gitlab": "python-gitlab",
    "google.cloud.storage": "google-cloud-storage",
    "google.genai": "google-genai",
    "google.generativeai": "google-generativeai",
    "google.oauth2": "google-auth",
    "google.protobuf": "protobuf",
    "googleapiclient": "google-api-python-client",
    "grpc": "grpcio",
    "haystack": "haystack-ai",
    "jose": "python-jose",
    "jpype": "JPype1",
    "jwt": "PyJWT",
    "ldap": "python-ldap",
    "llama_cpp": "llama-cpp-python",
    "lunar_python": "lunar-python",
    "magic": "python-magic",
    "markdown_it": "markdown-it-py",
    "mem0": "mem0ai",
    "memcache": "python-memcached",
    "multipart": "python-multipart",
    "mysql.connector": "mysql-connector-python",
    "nacl": "PyNaCl",
    "odf": "odfpy",
    "paho.mqtt": "paho-mqtt",
    "pkg_resources": "setuptools",
    "playhouse": "peewee",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "qdrant_client": "qdrant-client",
    "readability": "readability-lxml",
    "ruamel": "ruamel.yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "socketio": "python-socketio",
    "socks": "PySocks",
    "speech_recognition": "SpeechRecognition",
    "talib": "TA-Lib",
    "tavily": "tavily-python",
    "telegram": "python-telegram-bot",
    "tencentcloud": "tencentcloud-sdk-python",
    "usb": "pyusb",
    "vlc": "python-vlc",
    "volcenginesdkarkruntime": "volcengine-python-sdk",
    "websocket": "websocket-client",
    "wx": "wxPython",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


def distribution_of(module: str) -> str:
    """Return the distribution to install for a module; its top-level name unless another one is known."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        known = _DISTRIBUTIONS.get(".".join(parts[:length]))
        if known is not None:
            return known
    return parts[0]
