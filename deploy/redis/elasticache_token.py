#!/usr/bin/env python3
"""Print a token that logs in to AWS ElastiCache or MemoryDB with IAM, for 15 minutes.

Usage: elasticache_token.py USER CACHE REGION [elasticache | serverless | memorydb]

CACHE is the name of the replication group, of the serverless cache, or of the MemoryDB cluster, in lower case. The
credentials are those that AWS' own tools use (environment, role of the pod or of the machine). Needs botocore:
pip install botocore.
"""

import sys
from urllib.parse import urlencode

from botocore.model import ServiceId
from botocore.session import get_session
from botocore.signers import RequestSigner

LIFETIME_SECONDS = 900


def token(user: str, cache: str, region: str, kind: str) -> str:
    """Return a presigned request without its scheme, as the servers expect it in place of a password."""
    service = "memorydb" if kind == "memorydb" else "elasticache"
    query = {"Action": "connect", "User": user}
    if kind == "serverless":
        query["ResourceType"] = "ServerlessCache"
    session = get_session()
    signer = RequestSigner(
        ServiceId(service), region, service, "v4", session.get_credentials(), session.get_component("event_emitter")
    )
    request = {"method": "GET", "url": f"https://{cache}/?{urlencode(query)}", "body": {}, "headers": {}, "context": {}}
    url = signer.generate_presigned_url(
        request, operation_name="connect", expires_in=LIFETIME_SECONDS, region_name=region
    )
    return url.removeprefix("https://")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[4:] not in ([], ["elasticache"], ["serverless"], ["memorydb"]):
        sys.exit(__doc__)
    user, cache, region, *kind = sys.argv[1:]
    print(token(user, cache, region, kind[0] if kind else "elasticache"))
