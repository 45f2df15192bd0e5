"""Every limit of the service, named with its unit. Nothing is unbounded; nothing is bounded elsewhere."""

from __future__ import annotations

from typing import Final

# Intake
PAYLOAD_BYTES_MAX_DEFAULT: Final = 256 * 1024
PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024  # what PAYLOAD_BYTES_MAX may be set to
ENVELOPE_BYTES_MAX: Final = 64 * 1024  # a request body beyond its payload
REQUEST_BYTES_MAX: Final = 1024 * 1024  # any request body but an intake: 10,000 ids fit
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
EVENT_ID_CHARS_MAX: Final = 255
EVENT_TYPE_CHARS_MAX: Final = 255
CONTENT_TYPE_CHARS_MAX: Final = 255
METADATA_ENTRIES_MAX: Final = 20
METADATA_KEY_CHARS_MAX: Final = 64
METADATA_VALUE_CHARS_MAX: Final = 512
DELAY_SECONDS_MAX: Final = 366 * 86_400
DEADLINE_SECONDS_MAX: Final = 60 * 86_400
BATCH_DELIVERIES_MAX: Final = 1_000
UNRESCUED_MAX: Final = 1_000  # claims that one dispatcher passes over because their rescue was refused
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024  # of a request body that holds a batch
PAGE_ITEMS_MAX: Final = 250
PAGE_ITEMS_DEFAULT: Final = 50
CURSOR_CHARS_MAX: Final = 1_024

# Destinations
NAME_CHARS_MAX: Final = 200
URL_CHARS_MAX: Final = 2_048
HOST_CHARS_MAX: Final = 253  # RFC 1035, without the root's dot
HEADERS_COUNT_MAX: Final = 32
HEADER_NAME_CHARS_MAX: Final = 128
HEADER_VALUE_CHARS_MAX: Final = 2_048
HEADERS_BYTES_MAX: Final = 8_192
TIMEOUT_SECONDS_MIN: Final = 1.0
TIMEOUT_SECONDS_MAX: Final = 60.0
TIMEOUT_SECONDS_DEFAULT: Final = 15.0
ATTEMPTS_MAX_DEFAULT: Final = 18
ATTEMPTS_MAX: Final = 100
RETRY_DELAY_SECONDS_MAX: Final = 7 * 86_400
RETRY_AFTER_SECONDS_MAX: Final = 86_400  # a receiver may ask for a day, not for a year
RESPONSE_RULES_MAX: Final = 64
SECRETS_MAX: Final = 4  # signatures on one request during a rotation
SECRET_BYTES_MIN: Final = 24  # Standard Webhooks: 24 to 64 bytes
SECRET_BYTES_MAX: Final = 64
SECRET_OVERLAP_SECONDS_DEFAULT: Final = 86_400  # a rotated secret signs on for so long
SECRET_OVERLAP_SECONDS_MAX: Final = 30 * 86_400

# Attempts
CLAIM_IDS_MAX: Final = 100  # deliveries in one claim, whose payloads are all read at once
CLAIM_YOUNG_SECONDS: Final = 5.0  # a claim older than this when the first byte is due is given up unsent
CRASHED_CLAIMS_MAX: Final = 3  # claims in a row that ended without an outcome: the delivery is poison
EXCERPT_BYTES_MAX: Final = 1_024  # of a response body, kept with the attempt
RESPONSE_BYTES_MAX: Final = 64 * 1024  # of a response body, read before the connection is closed
RESPONSE_HEADERS_BYTES_MAX: Final = 64 * 1024  # of all heads together, interim ones included
RESPONSE_HEADER_BYTES_KEPT_MAX: Final = 2_048  # of the value of a header that is looked at
RESPONSE_CHUNK_LINES_MAX: Final = 256  # of a response body, trailers included; each costs as much as a kilobyte
CHUNK_LINE_BYTES_MAX: Final = 4_096  # of a response body: a chunk's size with its extensions, or one trailer
ERROR_CHARS_MAX: Final = 300

# Connections to receivers
LOOKUPS_MAX: Final = 512  # threads in the system's resolver, those that nobody waits for any more included
DIAL_PATIENCE_SECONDS: Final = 1.0  # for one address of a name while another waits to be tried
TLS_SHUTDOWN_SECONDS: Final = 1.0
TLS_WRITTEN_BYTES_MAX: Final = 16 * 1024  # a larger request under TLS is not known to have left this process
PROXY_CHECK_SECONDS: Final = 5.0  # for `hookledger doctor`, which asks whether the egress proxy accepts
KEPT_ALIVE_MAX: Final = 1_024  # idle connections of one process; the longest idle goes first
KEPT_ALIVE_PER_DESTINATION_MAX: Final = 128
KEPT_ALIVE_SECONDS: Final = 30.0
KEPT_ALIVE_MARGIN_SECONDS: Final = 1.0  # leave before the receiver does: its `Keep-Alive: timeout=`
CONNECTION_SECONDS_MAX: Final = 300.0  # after this a name is looked up and judged anew

# The queue
HINT_IDS_MAX: Final = 50  # delivery ids in one arq job
HINTS_TAKEN_MAX: Final = 100  # jobs that a worker takes at once
HINT_JOBS_MAX: Final = 400  # jobs waiting in Redis before the dispatcher holds back
HINT_VISIBILITY_SECONDS_MAX: Final = 60.0
HINT_PATIENCE_SECONDS: Final = 10.0  # how long a hint waits in a worker for a free slot
HINTS_WAITING_MAX: Final = 10_000  # ids one process keeps while Redis is slow; the rest is left to the dispatcher

# Group commit
FLUSH_ROWS_MAX: Final = 200
FLUSH_BYTES_MAX: Final = 8 * 1024 * 1024
FLUSH_WAITING_MAX: Final = 5_000  # rows waiting for a flush before new ones are answered 503

# The dispatcher
DUE_BATCH: Final = 1_000
RESCUE_BATCH: Final = 200
PARK_BATCH: Final = 1_000
REDRIVE_BATCH: Final = 100
PASS_ROUNDS_MAX: Final = 20  # full batches one step may take in one pass

# Redrive
REDRIVE_ITEMS_MAX: Final = 10_000
REDRIVE_RATE_PER_SECOND_MIN: Final = 0.001  # slower than one in a quarter of an hour is no rate
REDRIVE_RATE_PER_SECOND_MAX: Final = 1_000
REDRIVE_BURST_SECONDS: Final = 1.0  # of a rated redrive, made up for after a pause of the dispatcher
REDRIVES_PER_PASS_MAX: Final = 2_000
SUMMARY_GROUPS_MAX: Final = 1_000  # destinations times reasons in one summary
FIELD_ERRORS_MAX: Final = 100  # of ten thousand ids all may be wrong; the first few say what is
REASON_CHARS_MAX: Final = 500
DRY_RUN_SAMPLE: Final = 20

# What is counted
TALLIES_WRITE_SECONDS: Final = 5.0  # between two writes of a process's counts; what its kill may cost
TALLIES_KEYS_MAX: Final = 10_000  # tenants times names that one process counts between two writes
TALLIES_KEPT_SECONDS: Final = 86_400
TALLIES_FORGET_BATCH: Final = 10_000
STATS_WINDOW_SECONDS: Final = 300  # over which rates are told
STATS_ROWS_MAX: Final = 50_000  # open deliveries, of all tenants, that one answer looks at: the oldest
STATS_DEAD_ROWS_MAX: Final = 125_000  # dead deliveries, of all tenants, that one answer looks at

# Keys
KEY_CACHE_SECONDS: Final = 3.0  # how long a look-up is kept, and so how long a revoked key may still work
KEY_CACHE_ENTRIES_MAX: Final = 10_000
AD_HOC_CACHE_ENTRIES_MAX: Final = 10_000
DESTINATION_IDS_KEPT_MAX: Final = 4_096  # of which both forms are remembered, text and number
