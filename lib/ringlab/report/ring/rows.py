"""Names that the claims about ranks import; each lives where it is imported from here."""

from ..columns import peak_bytes, per_token, rows_of, sent_bytes, timed
from ..findings import gaps_line
from ..findings import trust_line as error_line
from ..published import KB, MB

__all__ = ["KB", "MB", "error_line", "gaps_line", "peak_bytes", "per_token", "rows_of", "sent_bytes", "timed"]
