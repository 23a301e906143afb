//! Frames of checks on streams of `sluicegate.v1`.

use std::{collections::HashMap, time::Duration};

use sluicegate_proto::sluicegate::v1::{
    Check, CheckFrame, ResponseFrame, check_response::Outcome, decision_service_client::DecisionServiceClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::{
    features::{DOMAIN, FEATURES, Feature},
    load::{Context, Instance},
    observer::{Failure, Via},
    support::request_for,
};

/// Checks in a frame.
const CHECKS: u64 = 10;

/// The caller's side of a stream.
struct Caller {
    frames: mpsc::Sender<CheckFrame>,
    responses: Streaming<ResponseFrame>,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Box::new(status).into()
    }
}

impl From<Box<Status>> for Failure {
    fn from(status: Box<Status>) -> Self {
        crate::support::raw_client::Error::Call(status).into()
    }
}

pub(super) fn start(context: &Context) {
    let index = Feature::index("stream");
    let pause = Duration::from_millis(1_000 * CHECKS * context.redis.len() as u64 / FEATURES[index].rate);
    for instance in 0..context.redis.len() {
        let context = context.clone();
        tokio::spawn(async move {
            let mut caller = None;
            loop {
                let result = exchange(index, &context.redis[instance], &mut caller, &context).await;
                if result.is_err() {
                    caller = None;
                }
                tokio::time::sleep(pause).await;
            }
        });
    }
}

/// Sends a frame and receives the response of each check.
async fn exchange(
    index: usize,
    instance: &Instance,
    caller: &mut Option<Caller>,
    context: &Context,
) -> Result<(), Failure> {
    let via = if caller.is_some() { Via::Connection } else { Via::NewConnection };
    let call = async {
        let caller = match caller {
            Some(caller) => caller,
            None => caller.insert(open(instance).await?),
        };
        let check = |id| {
            let entity = format!("e{}", id % FEATURES[index].entities);
            Check { id, request: Some(request_for(DOMAIN, &[("stream", &entity)]).into()), ..Check::default() }
        };
        let frame = CheckFrame { checks: (0..CHECKS).map(check).collect() };
        caller.frames.send(frame).await.map_err(|_| Failure::Connection)?;
        let mut outcomes = HashMap::new();
        while outcomes.len() < CHECKS as usize {
            let frame = caller.responses.message().await?.ok_or(Failure::Connection)?;
            outcomes.extend(frame.responses.into_iter().map(|response| (response.id, response.outcome)));
        }
        Ok::<_, Failure>(outcomes)
    };
    let (outcomes, span) = context.observer.call(via(instance.target.index), "stream", call).await?;
    for (id, outcome) in outcomes {
        match outcome {
            Some(Outcome::Verdict(verdict)) if verdict.allowed => {
                context.observer.admit(index, id % FEATURES[index].entities, span);
            }
            Some(Outcome::Verdict(_)) => {}
            _ => {
                let failure = Failure::Status("in a frame".to_owned());
                context.observer.record(via(instance.target.index), "stream", span, Duration::ZERO, Some(&failure));
            }
        }
    }
    Ok(())
}

async fn open(instance: &Instance) -> Result<Caller, Failure> {
    let channel = instance.target.endpoint.connect().await.map_err(|_| Failure::Connection)?;
    let (frames, receiver) = mpsc::channel(4);
    let responses = DecisionServiceClient::new(channel).stream(ReceiverStream::new(receiver)).await?.into_inner();
    Ok(Caller { frames, responses })
}
