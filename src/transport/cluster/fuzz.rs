//! Fuzz target: messages of a peer.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::sync::Arc;

use bytes::Bytes;
use sluicegate_proto::sluicegate::cluster::v1 as proto;

use super::{calls::decode_checked, message};
use crate::{
    algorithm::Micros,
    store::{
        Memory, memory,
        peers::{Metrics, Peers},
    },
};

/// The time of the instance that receives the messages.
const NOW: Micros = Micros::from_secs(1_763_672_400);

/// Applies a message of a peer. The first byte selects its type: increments, copied counters or overrides.
///
/// The counters must afterwards be publishable to other peers.
pub fn peer_message(input: &[u8]) {
    let Some((kind, input)) = input.split_first() else {
        return;
    };
    let memory = Arc::new(Memory::exchanged(&memory::Settings { max_counters: 1_000 }));
    let peers = Peers::with_epoch(memory, Metrics::new(), 1);
    let input = Bytes::copy_from_slice(input);
    match kind % 3 {
        0 => {
            let pull = decode_checked::<proto::PullResponse>(input).ok();
            if let Some(batch) = pull.and_then(|pull| message::decode(&pull).ok()) {
                peers.apply(&batch, NOW);
            }
        }
        1 => {
            if let Ok(page) = decode_checked::<proto::CopyPage>(input) {
                peers.insert_copies(message::decode_copies(&page.counters), NOW);
            }
        }
        _ => {
            if let Ok(page) = decode_checked::<proto::OverridesPage>(input) {
                let _ = message::encode_overrides(message::decode_overrides(page));
            }
        }
    }
    peers.publish(NOW);
    let copies: Vec<_> = (0..).map_while(|part| peers.copy_part(part)).flatten().collect();
    let again = message::decode_copies(&message::encode_copies(&copies));
    assert_eq!(again.len(), copies.len());
}
