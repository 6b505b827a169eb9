/* pooled.pml - pooled workers: does PooledDriver (osrdyne/drivers/pooled) keep the promises that lifecycle.pml relies
 * on? A start makes one worker for (key, slot), a stop has returned only when the worker is gone, a listing is complete
 * or an error. Workers of the key live inside processes ("assignments") and are started and ended by messages that may
 * be late, doubled, lost and out of order. One key and one slot: another key meets this one only in a process that
 * ends, which is in the model as a fault. Requests, bindings and the evidence before a deletion are in lifecycle.pml.
 *
 * Written as lifecycle.pml is: one `do`, each option is one indivisible step of one party, faults have budgets, and when
 * no step is left everything must have come to its end. README.md says more, variants.toml lists the flags.
 */

/* ------------------------------------------------------------------------------------------------ bounds and faults */
#ifndef NT
#define NT 2      /* terms; each has its own leader, and all but the last may lose its token */
#endif
#ifndef NP
#define NP 3      /* processes that are ever started */
#endif
#ifndef NW
#define NW 4      /* assignments that are ever made */
#endif
#ifndef DIE
#define DIE 1     /* processes that die (kill -9), or stop reacting, or are killed although they only were slow */
#endif
#ifndef EXITS
#define EXITS 0   /* assignments that end by themselves */
#endif
#ifndef IDLE
#define IDLE 1    /* the group is not wanted any more: an idle release */
#endif
#ifndef WAKE
#define WAKE 0    /* it is wanted again */
#endif
#ifndef LOSS
#define LOSS 0    /* control messages that are lost */
#endif
#ifndef SPARES
#define SPARES 0
#endif
#ifndef RECYCLE
#define RECYCLE 0 /* processes that shall take no more keys (age, requests, other settings) */
#endif
#ifndef EMPTY
#define EMPTY 0   /* processes ended on purpose because they have no assignment */
#endif

#define B(i) (1<<(i))
#if NP == 2
#define FORP(M,t) M(t,0) M(t,1)
#define ALLP 3
#elif NP == 3
#define FORP(M,t) M(t,0) M(t,1) M(t,2)
#define ALLP 7
#else
#define FORP(M,t) M(t,0) M(t,1) M(t,2) M(t,3)
#define ALLP 15
#endif
#if NW == 3
#define FORW(M,t) M(t,0) M(t,1) M(t,2)
#define ANYW(M,t) (M(t,0) || M(t,1) || M(t,2))
#define SUMW(M) (M(0)+M(1)+M(2))
#elif NW == 4
#define FORW(M,t) M(t,0) M(t,1) M(t,2) M(t,3)
#define ANYW(M,t) (M(t,0) || M(t,1) || M(t,2) || M(t,3))
#define SUMW(M) (M(0)+M(1)+M(2)+M(3))
#else
#define FORW(M,t) M(t,0) M(t,1) M(t,2) M(t,3) M(t,4)
#define ANYW(M,t) (M(t,0) || M(t,1) || M(t,2) || M(t,3) || M(t,4))
#define SUMW(M) (M(0)+M(1)+M(2)+M(3)+M(4))
#endif

/* ------------------------------------------------------------------------------------------------------------ state */
bit want = 1;                           /* tracker: the group is wanted; it survives a change of leader */
bit qx;                                 /* the request queue exists */
/* processes, instances of the inner driver */
#define STARTING 1                      /* exists; its control queue does not yet */
#define UP 2
#define HUNG 3                          /* reacts to nothing any more; what it runs may go on */
#define ENDED 4
byte ps[NP], pst[NP];                   /* state; the term + 1 that started it */
byte hi[NP];                            /* highest term + 1 whose message it has seen */
bit dr[NP];                             /* takes no more assignments */
byte asked[NP];                         /* terms whose question it has seen */
byte ip[NP], ik[NP], ie[NP];            /* calls of the inner driver under way: start (term + 1), stop, and of these the
                                           stops of empty processes (masks of terms); they outlive leadership */
/* assignments: st[w] is what its process at[w] knows of it */
#define UNKNOWN 0
#define RUN 1
#define STOPPING 2
#define EXITED 3                        /* ended, and still reported */
#define FORGOTTEN 4                     /* refused or forgotten: never started again, not reported */
#define DEAD 5                          /* ended with its process */
#define NOTRACE 6                       /* broken variants: not reported, and an assign starts it (again) */
#define HIDDEN 7                        /* broken variants: runs, and is not reported */
byte st[NW], at[NW], tm[NW], nw;        /* tm: the term that made it */
bit late[NW];                           /* BOUND: came to a process that the true leader had not found yet */
/* control messages under way, of which any number of copies may arrive, now or later; masks of the terms that sent them */
bit ma[NW]; byte mr[NW], mf[NW];        /* assign, release, forget */
byte mq[NP], md[NP];                    /* state, drain */
/* the last state report of each process; it reaches any leader at any later time or never */
byte bs[NW], bq[NP]; bit bd[NP];
#ifdef NOSEQ
byte olds[NW];                          /* an earlier report, which may still arrive */
#endif
/* leaders, one for each term */
#define WAITING 0
#define LEADS 1
#define DEPOSED 2                       /* has not noticed yet: a driver call goes on, nothing new is decided (lease) */
#define OVER 3
byte ph[NT];
byte kn[NT], an[NT], ld[NT];            /* processes: known, answered or gone, not to be given more assignments (masks) */
#if RECYCLE > 0
byte rt[NT];                            /* asked to drain, so that their keys move */
#define RETIRES(t,p) rt[t]=rt[t]|B(p);
#define RETIRED(t,p) HAS(rt[t],p)
#define FORGETRETIRED(t) rt[t]=0;
#else
#define RETIRES(t,p)
#define RETIRED(t,p) false
#define FORGETRETIRED(t)
#endif
bit cs[NT];                             /* a call of start() is under way and has not sent its assign */
#define NOTHING 0
#define TAKEN 1                         /* assign sent, not answered: listed as running */
#define LIVE 2                          /* reported as running or stopping */
#define GONE 3                          /* reported as exited, or its process is gone: listed as exited */
#define REMOVED 4
byte vw[NT*NW];
#define V(t,w) vw[(t)*NW+(w)]
byte noted;                             /* ends that the present leader has noted (mask) */
byte die = DIE, exits = EXITS, idle = IDLE, wake = WAKE, loss = LOSS, cuts = NT-1, rec = RECYCLE, emp = EMPTY;
byte fault;
#ifdef ONLY
#define FAIL(n) if :: n==ONLY -> fault=n; assert(fault!=n) :: else fi
#else
#define FAIL(n) fault=n; assert(fault!=n)
#endif
#define WRONG_END 3       /* the end has come, and assignments, queue or processes are not what is wanted */
#define BUSY_STOPPED 4    /* the true leader ended a process as empty that had an assignment */
#define DOUBLE 7          /* two live assignments of the key and slot */
#define UNLISTED 8        /* the listing of the true leader is complete, and a live assignment is not in it */
#define DELETED_UNDER 9   /* the queue was deleted, and a live assignment may still consume it */
#define END_LOST 10       /* an assignment that was listed as running vanished from the listing without its end */
#define END_TWICE 11      /* an end was listed again after it was removed */
#define EXHAUSTED 12      /* NW or NP is too small */

/* ---------------------------------------------------------------------------------------------------------- derived */
#define ALIVE(w) (st[w]==RUN || st[w]==STOPPING || st[w]==HIDDEN)
#define TRUE(t) (ph[t]==LEADS)
#define HAS(m,i) (((m) & B(i))!=0)
#ifdef PARTIAL
#define COMPLETE(t) true                /* a listing while processes have yet to answer: what is known is listed */
#else
#define COMPLETE(t) ((kn[t] & ~an[t])==0)
#endif
#ifdef FORGETTAKEN
#define COUNTS(t,w) (V(t,w)==LIVE)      /* an assign that was not answered counts as not done */
#else
#define COUNTS(t,w) (V(t,w)==TAKEN || V(t,w)==LIVE)
#endif
#define ENTRY(t,w) (COUNTS(t,w) || V(t,w)==GONE)
#define ENTRIES(t) ANYW(ENTRY,t)
#define LIVES(p,w) (ALIVE(w) && at[w]==p)
#define ISAT(p,w) ((ALIVE(w) || st[w]==EXITED) && at[w]==p)
#define MAYTAKE(t,p) (HAS(kn[t],p) && HAS(an[t],p) && !HAS(ld[t],p) && !(TRUE(t) && ps[p]==ENDED))

#ifdef BOUND
#define SINGLE(w) (ALIVE(w) && !late[w])
#define ISLATE(w) (ALIVE(w) && late[w])
#define TWO (SUMW(SINGLE)>1 || SUMW(ISLATE)>NT-1)
#define FOUND(t,w) (HAS(kn[t],at[w]) && HAS(an[t],at[w]))
#define NOTELATE(t,w) if :: TRUE(t) && tm[w]!=t && !(HAS(kn[t],at[w]) && HAS(an[t],at[w])) -> late[w]=1 :: else fi;
#else
#define TWO (SUMW(ALIVE)>1)
#define FOUND(t,w) true
#define NOTELATE(t,w)
#endif
#define ISUNLISTED(t,w) (ALIVE(w) && FOUND(t,w) && V(t,w)!=TAKEN && V(t,w)!=LIVE)
#define MISSED(t) (TRUE(t) && COMPLETE(t) && ANYW(ISUNLISTED,t))
#define ISUNDER(t,w) (ALIVE(w) && FOUND(t,w))

/* ------------------------------------------- processes (osrdyne_worker/pooled, and the inner driver: osrdyne/drivers) */
#ifdef OLDTERM
#define HEARS(t,p) (ps[p]==UP)
#else
#define HEARS(t,p) (ps[p]==UP && t+1>=hi[p])    /* a message of an older term is ignored and not answered */
#endif
#define SEEN(t,p) if :: hi[p]<t+1 -> hi[p]=t+1 :: else fi;
#define REFUSES(w) (dr[at[w]] SLOTCHECK(w))
#ifdef NOSLOTCHECK
#define SLOTCHECK(w)
#else
#define TAKES(w,v) (v!=w && at[v]==at[w] && ALIVE(v))
#define SLOTCHECK(w) || ANYW(TAKES,w)
#endif
#ifdef NOTOMBSTONE
#define UNHEARDOF NOTRACE                       /* a release of an unknown worker is answered, and leaves no trace */
#else
#define UNHEARDOF FORGOTTEN
#endif
#ifdef FORGETSIDS
#define DROPPED NOTRACE
#else
#define DROPPED FORGOTTEN
#endif
#ifdef FORGETRUNNING
#define FORGETS(w) (st[w]==EXITED || ALIVE(w) && st[w]!=HIDDEN)
#else
#define FORGETS(w) (st[w]==EXITED)              /* one that still runs is left alone */
#endif
#ifdef DROPEXITED
#define ENDSAS FORGOTTEN
#else
#define ENDSAS EXITED
#endif
#ifdef REPORTEARLY
#define REPORTS(w) (st[w]==STOPPING -> EXITED : (st[w]==HIDDEN -> FORGOTTEN : st[w]))
#else
#define REPORTS(w) (st[w]==HIDDEN -> FORGOTTEN : (st[w]==STOPPING -> RUN : st[w]))
#endif
#ifdef RESTARTS
#define RESTARTED(p,w) if :: w<nw && at[w]==p -> st[w]=UNKNOWN :: else fi;
#define RESTART(p) \
   :: d_step{ die>0 && ps[p]==UP -> printf("process %d is started again under its id\n",p); die--; \
        hi[p]=0; asked[p]=0; dr[p]=0; ps[p]=STARTING; FORW(RESTARTED,p) }
#else
#define RESTART(p)
#endif
#define DIESWITH(p,w) if :: w<nw && ISAT(p,w) -> st[w]=DEAD :: else fi;
#define ENDPROCESS(p) ps[p]=ENDED; FORW(DIESWITH,p)

#define ASSIGNMENT(_,w) \
   :: d_step{ ma[w] && HEARS(tm[w],at[w]) && (st[w]==UNKNOWN || st[w]==NOTRACE) -> \
        SEEN(tm[w],at[w]) \
        if :: REFUSES(w) -> printf("process %d refuses assignment %d\n",at[w],w); st[w]=FORGOTTEN \
           :: else -> printf("process %d starts assignment %d\n",at[w],w); st[w]=RUN; ALLT(NOTELATE,w) fi } \
   EACHTERM(RELEASED,w) EACHTERM(FORGOT,w) \
   :: d_step{ st[w]==STOPPING && ps[at[w]]==UP -> \
        printf("assignment %d has ended, or was cut off\n",w); st[w]=ENDSAS } \
   :: d_step{ exits>0 && st[w]==RUN && ps[at[w]]==UP -> \
        printf("assignment %d ends by itself\n",w); exits--; st[w]=ENDSAS } \
   LOSE(ma[w],"assign of %d is lost\n",w) LOSE(mr[w],"release of %d is lost\n",w) LOSE(mf[w],"forget of %d is lost\n",w)
#define RELEASED(t,w) \
   :: d_step{ HAS(mr[w],t) && HEARS(t,at[w]) && (st[w]==RUN || st[w]==HIDDEN || st[w]==UNKNOWN) -> \
        printf("process %d gets the release of assignment %d (state %d)\n",at[w],w,st[w]); SEEN(t,at[w]) \
        if :: st[w]==RUN -> st[w]=STOPPING :: st[w]==HIDDEN -> skip :: else -> st[w]=UNHEARDOF fi }
#define FORGOT(t,w) \
   :: d_step{ HAS(mf[w],t) && HEARS(t,at[w]) && FORGETS(w) -> \
        printf("process %d forgets assignment %d (state %d)\n",at[w],w,st[w]); SEEN(t,at[w]) \
        if :: st[w]==EXITED -> st[w]=DROPPED :: else -> st[w]=HIDDEN fi }
#define LOSE(m,what,w) \
   :: d_step{ loss>0 && m!=0 -> printf(what,w); loss--; m=0 }

#define QUESTION(t,p) \
   :: d_step{ HAS(mq[p],t) && HEARS(t,p) && !HAS(asked[p],t) -> \
        printf("process %d gets the question of term %d\n",p,t); SEEN(t,p) asked[p]=asked[p]|B(t) } \
   :: d_step{ HAS(md[p],t) && HEARS(t,p) && !dr[p] -> \
        printf("process %d is asked to drain by term %d\n",p,t); SEEN(t,p) dr[p]=1 }
#define STALE(p,w) (at[w]==p && w<nw && bs[w]!=REPORTS(w))
#define STATEOF(p,w) if :: w<nw && at[w]==p -> KEEPOLD(w) bs[w]=REPORTS(w) :: else fi;
#define PROCESS(_,p) \
   :: d_step{ ip[p]!=0 && ps[p]==0 -> \
        printf("inner driver: process %d starts, for term %d\n",p,ip[p]-1); ps[p]=STARTING; pst[p]=ip[p]; STARTTERM(p) ip[p]=0 } \
   :: d_step{ ps[p]==STARTING -> printf("process %d consumes its control queue\n",p); ps[p]=UP } \
   :: d_step{ die>0 && (ps[p]==STARTING || ps[p]==UP) -> printf("process %d dies\n",p); die--; ENDPROCESS(p) } \
   RESTART(p) \
   :: d_step{ die>0 && ps[p]==UP -> printf("process %d hangs\n",p); die--; ps[p]=HUNG } \
   :: d_step{ ps[p]==UP && dr[p] && !ANYW(ISAT,p) -> printf("process %d has drained, ends\n",p); ENDPROCESS(p) } \
   :: d_step{ ps[p]==UP && (ANYW(STALE,p) || bq[p]!=asked[p] || bd[p]!=dr[p]) -> \
        printf("process %d reports\n",p); bq[p]=asked[p]; bd[p]=dr[p]; \
        FORW(STATEOF,p) } \
   EACHTERM(QUESTION,p) LOSE(mq[p],"question of %d is lost\n",p) LOSE(md[p],"drain of %d is lost\n",p)
#ifdef NOSEQ
#define KEEPOLD(w) olds[w]=bs[w];
#else
#define KEEPOLD(w)
#endif
#ifdef STARTSWITHTERM
#define STARTTERM(p) hi[p]=ip[p];      /* it is given the term of its start, and ignores older ones from the beginning */
#else
#define STARTTERM(p)
#endif

/* ----------------------------------------------------------------- what a leader knows (osrdyne/drivers/pooled) */
/* A process is used only when it was found while the token was held (a round trip on T after it was found). */
#ifdef LATEKNOW
#define MAYFIND(t,p) ((ph[t]==LEADS || ph[t]==DEPOSED) && (pst[p]==t+1 || TRUE(t) || ps[p]==UP))
#else
#define MAYFIND(t,p) TRUE(t)
#endif
#ifdef LATEKNOW
#define TRUSTED(t,p) (pst[p]==t+1 || !TRUE(t))     /* one that this term started holds nothing of an earlier term */
#else
#define TRUSTED(t,p) (pst[p]==t+1)
#endif
#ifdef REUSEDIDS
#define ANSWERS(t,p) (bq[p]!=0)                    /* the answer to an earlier term's question counts, too */
#else
#define ANSWERS(t,p) HAS(bq[p],t)
#endif
#ifdef ANYANSWER
#define DISPROVED(s) (s==UNKNOWN || s==FORGOTTEN || s==NOTRACE)
#else
#define DISPROVED(s) (s==FORGOTTEN || s==NOTRACE)  /* answered that very assign, or its release, without the worker */
#endif
#if defined(NOSEQ) || defined(RESTARTS)
#define ABSENT(s) (s==UNKNOWN || s==FORGOTTEN || s==NOTRACE)
#else
#define ABSENT(s) (s==FORGOTTEN || s==NOTRACE)
#endif
#ifdef LISTAGAIN
#define DROPSENT false                             /* what was removed is listed until the process has forgotten it */
#else
#define DROPSENT true
#endif
#define NEWS1(t,w,s) ((s==RUN && (V(t,w)==NOTHING || V(t,w)==TAKEN)) || (s==EXITED && V(t,w)<GONE) || \
                      (s==EXITED && V(t,w)==REMOVED && !DROPSENT && st[w]==EXITED) || \
                      (V(t,w)==TAKEN && DISPROVED(s)) || ((V(t,w)==LIVE || V(t,w)==GONE) && ABSENT(s)))
#define TAKE(t,w,s) \
   if :: s==RUN && (V(t,w)==NOTHING || V(t,w)==TAKEN) -> V(t,w)=LIVE \
      :: s==EXITED && (V(t,w)<GONE || !DROPSENT) -> V(t,w)=GONE \
      :: V(t,w)==TAKEN && DISPROVED(s) -> V(t,w)=REMOVED \
      :: V(t,w)==LIVE && ABSENT(s) -> V(t,w)=REMOVED; if :: TRUE(t) -> FAIL(END_LOST) :: else fi \
      :: V(t,w)==GONE && ABSENT(s) -> V(t,w)=REMOVED \
      :: else fi
#define NEWS(tp,w) (w<nw && at[w]==(tp)%NP && NEWS1((tp)/NP,w,bs[w]))
#define NEWSOLD(tp,w) (w<nw && at[w]==(tp)%NP && NEWS1((tp)/NP,w,olds[w]))
#define HEARNEWS(tp,w) if :: w<nw && at[w]==(tp)%NP -> TAKE((tp)/NP,w,bs[w]) :: else fi;
#define HEAROLD(tp,w) if :: w<nw && at[w]==(tp)%NP -> TAKE((tp)/NP,w,olds[w]) :: else fi;
#define HEARD(t) (ph[t]==LEADS || ph[t]==DEPOSED)
#define REPORTED(t,p) \
   :: d_step{ HEARD(t) && HAS(kn[t],p) && (ANYW(NEWS,t*NP+p) || !HAS(an[t],p) && ANSWERS(t,p) || bd[p] && !HAS(ld[t],p)) -> \
        printf("term %d hears process %d\n",t,p); \
        if :: bd[p] -> ld[t]=ld[t]|B(p); RETIRES(t,p) :: else fi; if :: ANSWERS(t,p) -> an[t]=an[t]|B(p) :: else fi; \
        FORW(HEARNEWS,t*NP+p) }
#ifdef NOSEQ
#define REPORTEDLATE(t,p) \
   :: d_step{ TRUE(t) && HAS(kn[t],p) && ANYW(NEWSOLD,t*NP+p) -> \
        printf("term %d hears an old report of process %d\n",t,p); \
        FORW(HEAROLD,t*NP+p) }
#else
#define REPORTEDLATE(t,p)
#endif
#define PENDING(tp,w) (w<nw && at[w]==(tp)%NP && (V((tp)/NP,w)==TAKEN || V((tp)/NP,w)==LIVE))
#define NOWGONE(tp,w) if :: PENDING(tp,w) -> V((tp)/NP,w)=GONE :: else fi;
#define LETGO(t,p) an[t]=an[t]|B(p); FORW(NOWGONE,t*NP+p)
#define KNOWS(t,p) \
   :: d_step{ MAYFIND(t,p) && ps[p]!=0 && ps[p]!=ENDED && !HAS(kn[t],p) -> \
        printf("term %d finds process %d\n",t,p); kn[t]=kn[t]|B(p); if :: TRUSTED(t,p) -> an[t]=an[t]|B(p) :: else fi } \
   :: d_step{ TRUE(t) && HAS(kn[t],p) && !HAS(an[t],p) && !HAS(mq[p],t) && !HAS(asked[p],t) && ps[p]!=ENDED AGAIN -> \
        printf("term %d asks process %d\n",t,p); mq[p]=mq[p]|B(t) } \
   REPORTED(t,p) REPORTEDLATE(t,p) \
   :: d_step{ TRUE(t) && HAS(kn[t],p) && ps[p]==ENDED && (ANYW(PENDING,t*NP+p) || !HAS(an[t],p)) -> \
        printf("term %d: the inner driver says that process %d is gone\n",t,p); LETGO(t,p) } \
   SILENT(t,p)

/* A process that does not answer is ended through the inner driver; only when it is gone its assignments are. A call
 * lands at any later time. */
#define QUIET(t,p) (TRUE(t) && HAS(kn[t],p) && !HAS(ik[p],t) && (ps[p]==HUNG || die>0 && (ps[p]==STARTING || ps[p]==UP)))
#ifdef NOKILL
#define ISQUIET(t,p) false
#else
#define ISQUIET(t,p) QUIET(t,p)
#endif
#define NOTSLOW(p) if :: ps[p]!=HUNG -> die-- :: else fi;
#ifdef ASSUMEDDEAD
#define SILENT(t,p) \
   :: d_step{ ISQUIET(t,p) && !HAS(ld[t],p) -> \
        printf("term %d takes process %d for dead\n",t,p); NOTSLOW(p) ld[t]=ld[t]|B(p); LETGO(t,p) }
#elif defined(ENDEDATONCE)
#define SILENT(t,p) \
   :: d_step{ ISQUIET(t,p) -> printf("term %d kills process %d, takes it for gone\n",t,p); NOTSLOW(p) \
        ik[p]=ik[p]|B(t); ld[t]=ld[t]|B(p); LETGO(t,p) } LANDS(t,p)
#else
#define SILENT(t,p) \
   :: d_step{ ISQUIET(t,p) -> printf("term %d kills process %d\n",t,p); NOTSLOW(p) ik[p]=ik[p]|B(t); ld[t]=ld[t]|B(p) } \
   LANDS(t,p)
#endif
#define LANDS(t,p) \
   :: d_step{ HAS(ik[p],t) -> printf("inner driver: stop of process %d by term %d\n",p,t); ik[p]=ik[p]&~B(t); \
        if :: HAS(ie[p],t) && TRUE(t) && ANYW(LIVES,p) -> FAIL(BUSY_STOPPED) :: else fi; \
        if :: ps[p]!=0 && ps[p]!=ENDED -> ENDPROCESS(p) :: else fi }

/* --------------------------------------------------- driver calls (osrdyne/drivers/pooled), as the loop makes them */
#ifdef NOREPEAT
#define AGAIN && loss==LOSS                        /* a lost message is not sent again */
#else
#define AGAIN
#endif
/* start(): the worker groups loop has found the slot free in a complete listing, and holds the lease. */
#define STARTS(t) \
   :: d_step{ TRUE(t) && want && !cs[t] && COMPLETE(t) && !ENTRIES(t) -> \
        printf("term %d decides to start\n",t); cs[t]=1; qx=1 }
#ifdef NORECHECK
#define STILLFREE(t) true
#define FINDSTAKEN(t)
#else
#define STILLFREE(t) (!ENTRIES(t))
#define FINDSTAKEN(t) \
   :: d_step{ TRUE(t) && cs[t] && ENTRIES(t) -> printf("term %d finds that the slot is taken\n",t); cs[t]=0 }
#endif
#define ASSIGNS(t,p) \
   :: d_step{ HEARD(t) && cs[t] && MAYTAKE(t,p) && STILLFREE(t) && nw<NW -> \
        printf("term %d sends assign %d to process %d\n",t,nw,p); \
        cs[t]=0; at[nw]=p; tm[nw]=t; ma[nw]=1; V(t,nw)=TAKEN; nw++ }
#define GIVESUP(t) \
   :: d_step{ TRUE(t) && cs[t] && !want -> printf("term %d gives the start up\n",t); cs[t]=0 }
/* stop(): release, until the process reports the end. remove(): forget. Both are repeated until they are answered. */
#ifdef FORGETEARLY
#define WITHFORGET(t,w) mf[w]=mf[w]|B(t);
#else
#define WITHFORGET(t,w)
#endif
#ifdef LATEKNOW
#define SURPLUS(t,w) || (w>0 && (V(t,0)==TAKEN||V(t,0)==LIVE) || w>1 && (V(t,1)==TAKEN||V(t,1)==LIVE) || \
                         w>2 && (V(t,2)==TAKEN||V(t,2)==LIVE) || w>3 && (V(t,3)==TAKEN||V(t,3)==LIVE))
#else
#define SURPLUS(t,w)
#endif
#define STOPS(t,w) \
   :: d_step{ TRUE(t) && COMPLETE(t) && (V(t,w)==TAKEN || V(t,w)==LIVE) && (!want || RETIRED(t,at[w]) SURPLUS(t,w)) && \
              !HAS(mr[w],t) && ps[at[w]]!=ENDED AGAIN -> \
        printf("term %d releases assignment %d\n",t,w); mr[w]=mr[w]|B(t); WITHFORGET(t,w) } \
   :: d_step{ TRUE(t) && V(t,w)==TAKEN && tm[w]==t && !ma[w] && ps[at[w]]!=ENDED AGAIN -> \
        printf("term %d repeats assign %d\n",t,w); ma[w]=1 } \
   :: d_step{ TRUE(t) && V(t,w)==GONE && COMPLETE(t) -> \
        printf("term %d notes the end of assignment %d, removes it\n",t,w); V(t,w)=REMOVED; \
        if :: HAS(noted,w) -> FAIL(END_TWICE) :: else noted=noted|B(w) fi; \
        if :: ps[at[w]]!=ENDED -> mf[w]=mf[w]|B(t) :: else fi } \
   :: d_step{ TRUE(t) && V(t,w)==REMOVED && bs[w]==EXITED && !HAS(mf[w],t) && ps[at[w]]!=ENDED AGAIN -> \
        printf("term %d repeats forget %d\n",t,w); mf[w]=mf[w]|B(t) }
/* The queue is deleted when the group is not wanted and nothing is listed (lifecycle.pml has the evidence beyond that). */
#define DELETES(t) \
   :: d_step{ TRUE(t) && !want && qx && !cs[t] && COMPLETE(t) && !ENTRIES(t) -> \
        printf("term %d deletes the queue\n",t); qx=0; if :: ANYW(ISUNDER,t) -> FAIL(DELETED_UNDER) :: else fi }
/* Processes: one that may take keys, and spares; old ones drain; an empty one is ended, and takes no key from then on. */
#define USABLE(t) (((kn[t] & ~ld[t]) & (ps[0]!=ENDED)) + (((kn[t] & ~ld[t])>>1) & (ps[1]!=ENDED)) USABLE2(t))
#if NP == 2
#define USABLE2(t)
#elif NP == 3
#define USABLE2(t) + (((kn[t] & ~ld[t])>>2) & (ps[2]!=ENDED))
#else
#define USABLE2(t) + (((kn[t] & ~ld[t])>>2) & (ps[2]!=ENDED)) + (((kn[t] & ~ld[t])>>3) & (ps[3]!=ENDED))
#endif
#define STARTED(t,p) (ip[p]==t+1 || (ps[p]!=0 && ps[p]!=ENDED && !HAS(kn[t],p)))
#if NP == 2
#define COMING(t) (STARTED(t,0) + STARTED(t,1))
#elif NP == 3
#define COMING(t) (STARTED(t,0) + STARTED(t,1) + STARTED(t,2))
#else
#define COMING(t) (STARTED(t,0) + STARTED(t,1) + STARTED(t,2) + STARTED(t,3))
#endif
#define FREE(p) (ps[p]==0 && ip[p]==0)
#define FIRSTFREE(p) (FREE(p) && (p==0 || !FREE((p+NP-1)%NP)))
#if EMPTY > 0
#ifdef ENDSTAKEN
#define OCCUPIED(tp,w) (w<nw && at[w]==(tp)%NP && V((tp)/NP,w)==LIVE)
#else
#define OCCUPIED(tp,w) PENDING(tp,w)
#endif
#ifdef ENDSOPEN
#define CLOSES(t,p)
#else
#define CLOSES(t,p) ld[t]=ld[t]|B(p);
#endif
#define ENDSEMPTY(t,p) \
   :: d_step{ emp>0 && TRUE(t) && COMPLETE(t) && HAS(kn[t],p) && ps[p]==UP && !HAS(ik[p],t) && !ANYW(OCCUPIED,t*NP+p) -> \
        printf("term %d ends process %d, which is empty\n",t,p); emp--; ik[p]=ik[p]|B(t); ie[p]=ie[p]|B(t); CLOSES(t,p) }
#else
#define ENDSEMPTY(t,p)
#endif
#define PROCESSES(t,p) \
   :: d_step{ TRUE(t) && COMPLETE(t) && (cs[t] -> 1 : 0)+SPARES > USABLE(t)+COMING(t) && FIRSTFREE(p) -> \
        printf("term %d starts process %d\n",t,p); ip[p]=t+1 } \
   :: d_step{ rec>0 && TRUE(t) && HAS(kn[t],p) && ps[p]==UP && !HAS(ld[t],p) -> \
        printf("term %d lets process %d drain\n",t,p); rec--; md[p]=md[p]|B(t); ld[t]=ld[t]|B(p); RETIRES(t,p) } \
   ENDSEMPTY(t,p) ASSIGNS(t,p) KNOWS(t,p)

/* ------------------------------------------------------------------------------------------------------- leadership */
#define EXISTS(p) (ps[p]!=0 && ps[p]!=ENDED)
#if NP == 2
#define LISTED (EXISTS(0) | (EXISTS(1)<<1))
#elif NP == 3
#define LISTED (EXISTS(0) | (EXISTS(1)<<1) | (EXISTS(2)<<2))
#else
#define LISTED (EXISTS(0) | (EXISTS(1)<<1) | (EXISTS(2)<<2) | (EXISTS(3)<<3))
#endif
#ifdef NOASK
#define ASSUMED(t) an[t]=kn[t];
#else
#define ASSUMED(t)
#endif
#define FORGETTERM(t) cs[t]=0; kn[t]=0; an[t]=0; ld[t]=0; FORGETRETIRED(t) FORW(UNSEE,t)
#define UNSEE(t,w) V(t,w)=NOTHING;
#define LEADER(t,before) \
   :: d_step{ ph[t]==WAITING && (t==0 || ph[before]>=DEPOSED) -> \
        printf("term %d begins, the inner driver lists %d\n",t,LISTED); ph[t]=LEADS; kn[t]=LISTED; noted=0; ASSUMED(t) } \
   :: d_step{ ph[t]==LEADS && cuts>0 && t<NT-1 -> printf("term %d loses its token (not noticed)\n",t); cuts--; ph[t]=DEPOSED } \
   :: d_step{ ph[t]==DEPOSED -> printf("the leader of term %d notices\n",t); ph[t]=OVER; FORGETTERM(t) } \
   STARTS(t) GIVESUP(t) FINDSTAKEN(t) DELETES(t) FORP(PROCESSES,t) FORW(STOPS,t)

#if NT == 3
#define EACHTERM(M,x) M(0,x) M(1,x) M(2,x)
#define ALLT(M,x) M(0,x) M(1,x) M(2,x)
#define TRUELEADER (ph[2]==LEADS -> 2 : (ph[1]==LEADS -> 1 : 0))
#else
#define EACHTERM(M,x) M(0,x) M(1,x)
#define ALLT(M,x) M(0,x) M(1,x)
#define TRUELEADER (ph[1]==LEADS -> 1 : 0)
#endif

/* -------------------------------------------------------------------------------------------------- the end, and all */
#define GOOD(t,w) (st[w]==RUN && ps[at[w]]==UP && V(t,w)==LIVE)
#define ISGOOD(w) GOOD(TRUELEADER,w)
#define LEFT(_,w) (st[w]==EXITED && ps[at[w]]==UP)
#define DEADENTRY(t,w) (V(t,w)==TAKEN || V(t,w)==GONE || (V(t,w)==LIVE && !GOOD(t,w)))
#define DROPBUDGET(b) :: d_step{ b>0 -> b=0 }

init {
  do
  :: d_step{ TWO -> printf("two live assignments\n"); FAIL(DOUBLE) }
  :: d_step{ MISSED(0) || MISSED(1) || MISSED(NT-1) -> printf("an assignment is not listed\n"); FAIL(UNLISTED) }
  FORP(PROCESS,_) FORW(ASSIGNMENT,_)
  LEADER(0,0) LEADER(1,0)
#if NT == 3
  LEADER(2,1)
#endif
  :: d_step{ idle>0 && want -> printf("the group is not wanted any more\n"); idle--; want=0 }
  :: d_step{ wake>0 && !want -> printf("the group is wanted again\n"); wake--; want=1 }
  DROPBUDGET(die) DROPBUDGET(exits) DROPBUDGET(idle) DROPBUDGET(wake) DROPBUDGET(loss) DROPBUDGET(cuts)
  DROPBUDGET(rec) DROPBUDGET(emp)
  :: else ->
     d_step {
       if :: nw==NW && cs[TRUELEADER] -> FAIL(EXHAUSTED)
          :: else ->
       if :: want -> if :: !(qx && SUMW(ISGOOD)==1 && SUMW(ALIVE)==1) -> FAIL(WRONG_END) :: else fi
          :: else -> if :: qx || SUMW(ALIVE)>0 -> FAIL(WRONG_END) :: else fi
       fi;
       if :: ANYW(LEFT,0) || ANYW(DEADENTRY,TRUELEADER) -> FAIL(WRONG_END) :: else fi
       fi;
       skip
     }
     break
  od
}
