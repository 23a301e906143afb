//! [`Calls`]: the calls of a follower to another instance. Responses are checked before they are decoded.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use bytes::{Buf as _, Bytes};
use http::uri::PathAndQuery;
use prost::Message;
use sluicegate_deadline::within;
use sluicegate_proto::sluicegate::cluster::v1 as proto;
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Channel,
};

use super::{
    MAX_MESSAGE_BYTES,
    error::FollowError,
    received::{MeteredChannel, ReadBudget, Received},
    service::PULL_WAIT,
    wire::{WireError, count_fields},
};

/// Timeout of a pull, and of the next page of a copy or of overrides.
const CALL_TIMEOUT: Duration = Duration::from_secs(2).saturating_add(PULL_WAIT);
/// Maximum number of increments in a response: those of a minute at the shortest `cluster.sync`, and the merged ones.
const MAX_INCREMENTS: usize = 20_000;
/// Maximum number of counters and positions in one page of a copy.
const MAX_COPY_ITEMS: usize = 20_000;
/// Maximum number of changes, overrides and rule sets in one page.
const MAX_OVERRIDES_ITEMS: usize = 1_000;
/// Maximum number of overrides in the changes of one page.
const MAX_CHANGED_OVERRIDES: usize = 20_000;

/// A response that can be checked before it is decoded.
pub(super) trait Checked: Message + Default {
    /// Checks the number of items of an encoded message.
    fn check(bytes: &[u8]) -> Result<(), WireError>;
}

impl Checked for proto::PullResponse {
    fn check(bytes: &[u8]) -> Result<(), WireError> {
        count_fields(bytes, &[6], MAX_INCREMENTS, |_| Ok(())).map(drop)
    }
}

impl Checked for proto::CopyPage {
    fn check(bytes: &[u8]) -> Result<(), WireError> {
        count_fields(bytes, &[2, 3], MAX_COPY_ITEMS, |_| Ok(())).map(drop)
    }
}

impl Checked for proto::OverridesPage {
    fn check(bytes: &[u8]) -> Result<(), WireError> {
        count_fields(bytes, &[3, 4], MAX_OVERRIDES_ITEMS, |_| Ok(()))?;
        let mut overrides = 0;
        count_fields(bytes, &[2], MAX_OVERRIDES_ITEMS, |change| {
            overrides += count_fields(change, &[4], MAX_CHANGED_OVERRIDES, |_| Ok(()))?;
            if overrides > MAX_CHANGED_OVERRIDES { Err(WireError::TooManyItems(MAX_CHANGED_OVERRIDES)) } else { Ok(()) }
        })
        .map(drop)
    }
}

impl Checked for proto::ActivityResponse {
    fn check(_: &[u8]) -> Result<(), WireError> {
        Ok(())
    }
}

/// A codec that checks responses before it decodes them.
struct CheckedCodec<Q, R>(PhantomData<(Q, R)>);

impl<Q: Message + 'static, R: Checked + Send + 'static> Codec for CheckedCodec<Q, R> {
    type Encode = Q;
    type Decode = R;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(PhantomData)
    }

    fn decoder(&mut self) -> Self {
        Self(PhantomData)
    }
}

impl<Q: Message, R> Encoder for CheckedCodec<Q, R> {
    type Item = Q;
    type Error = Status;

    fn encode(&mut self, request: Q, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        request.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<Q, R: Checked> Decoder for CheckedCodec<Q, R> {
    type Item = R;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<R>, Status> {
        decode_checked(buffer.copy_to_bytes(buffer.remaining())).map(Some)
    }
}

/// Checks and decodes a response. One that no member sends fails with `OUT_OF_RANGE`, like a message that is too large.
pub(super) fn decode_checked<R: Checked>(bytes: Bytes) -> Result<R, Status> {
    R::check(&bytes).map_err(|error| Status::out_of_range(error.to_string()))?;
    R::decode(bytes).map_err(|error| Status::out_of_range(error.to_string()))
}

/// Calls to one instance, one at a time.
pub(super) struct Calls {
    grpc: Grpc<MeteredChannel>,
    received: Arc<Received>,
}

/// The pages of a response.
pub(super) struct Pages<T> {
    stream: Streaming<T>,
    received: Arc<Received>,
}

impl Calls {
    pub(super) fn new(channel: Channel, budget: &Arc<ReadBudget>) -> Self {
        let received = Received::new(budget);
        let grpc = Grpc::new(MeteredChannel::new(channel, Arc::clone(&received)));
        Self { grpc: grpc.max_decoding_message_size(MAX_MESSAGE_BYTES), received }
    }

    pub(super) async fn pull(&mut self, request: proto::PullRequest) -> Result<proto::PullResponse, FollowError> {
        self.unary(request, "/sluicegate.cluster.v1.ClusterService/Pull").await
    }

    pub(super) async fn activity(
        &mut self,
        request: proto::ActivityRequest,
    ) -> Result<proto::ActivityResponse, FollowError> {
        self.unary(request, "/sluicegate.cluster.v1.ClusterService/Activity").await
    }

    pub(super) async fn copy(&mut self, request: proto::CopyRequest) -> Result<Pages<proto::CopyPage>, FollowError> {
        self.pages(request, "/sluicegate.cluster.v1.ClusterService/Copy").await
    }

    pub(super) async fn overrides(
        &mut self,
        request: proto::OverridesRequest,
    ) -> Result<Pages<proto::OverridesPage>, FollowError> {
        self.pages(request, "/sluicegate.cluster.v1.ClusterService/Overrides").await
    }

    async fn unary<Q: Message + 'static, R: Checked + Send + 'static>(
        &mut self,
        request: Q,
        path: &'static str,
    ) -> Result<R, FollowError> {
        self.received.clear();
        let call = async {
            self.grpc.ready().await?;
            let codec = CheckedCodec::<Q, R>(PhantomData);
            Ok(self.grpc.unary(Request::new(request), PathAndQuery::from_static(path), codec).await?.into_inner())
        };
        within_timeout(call).await
    }

    async fn pages<Q: Message + 'static, R: Checked + Send + 'static>(
        &mut self,
        request: Q,
        path: &'static str,
    ) -> Result<Pages<R>, FollowError> {
        self.received.clear();
        let call = async {
            self.grpc.ready().await?;
            let codec = CheckedCodec::<Q, R>(PhantomData);
            Ok(self.grpc.server_streaming(Request::new(request), PathAndQuery::from_static(path), codec).await?)
        };
        let stream = within_timeout(call).await?.into_inner();
        Ok(Pages { stream, received: Arc::clone(&self.received) })
    }
}

impl<T> Pages<T> {
    /// Returns the next page, or `None` after the last one.
    pub(super) async fn next(&mut self) -> Result<Option<T>, FollowError> {
        self.received.clear();
        within_timeout(async { Ok(self.stream.message().await?) }).await
    }
}

async fn within_timeout<T>(call: impl Future<Output = Result<T, FollowError>>) -> Result<T, FollowError> {
    within(CALL_TIMEOUT, call).await.unwrap_or(Err(FollowError::Timeout(CALL_TIMEOUT)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_with_more_items_than_a_member_sends_are_rejected() {
        let empty = |number: u8, count: usize| [number << 3 | 2, 0].repeat(count);
        for (check, number, max) in [
            (proto::PullResponse::check as fn(&[u8]) -> _, 6, MAX_INCREMENTS),
            (proto::CopyPage::check, 2, MAX_COPY_ITEMS),
            (proto::CopyPage::check, 3, MAX_COPY_ITEMS),
            (proto::OverridesPage::check, 2, MAX_OVERRIDES_ITEMS),
            (proto::OverridesPage::check, 3, MAX_OVERRIDES_ITEMS),
            (proto::OverridesPage::check, 4, MAX_OVERRIDES_ITEMS),
        ] {
            assert_eq!(check(&empty(number, max)), Ok(()), "{number}");
            assert_eq!(check(&empty(number, max + 1)), Err(WireError::TooManyItems(max)), "{number}");
        }
    }

    #[test]
    fn the_overrides_of_all_changes_of_a_page_are_counted() {
        let page = |changes: usize, overrides: usize| {
            let change = proto::OverridesChange {
                changes: vec![proto::OverrideChange::default(); overrides],
                ..proto::OverridesChange::default()
            };
            proto::OverridesPage { changes: vec![change; changes], ..Default::default() }.encode_to_vec()
        };
        assert_eq!(proto::OverridesPage::check(&page(200, 100)), Ok(()));
        let error = Err(WireError::TooManyItems(MAX_CHANGED_OVERRIDES));
        assert_eq!(proto::OverridesPage::check(&page(201, 100)), error);
        assert_eq!(proto::OverridesPage::check(&page(1, MAX_CHANGED_OVERRIDES + 1)), error);
    }
}
